"""The shell around the pages: language, link state, page template, components, error panel.  Only this package,
``app.py`` and ``pages/`` know Streamlit."""
