"""Records in, Plotly figures out, each with a ``describe_*`` sentence made from the same record.

Nothing here computes numerics or knows Streamlit, so the same figures serve the app, a report and a notebook.
"""
