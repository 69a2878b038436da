"""nvfp4viz in the browser: page config, navigation, language, error boundary.  Nothing else lives here."""

import streamlit as st

from nvfp4viz.ui.errors import boundary
from nvfp4viz.ui.shell import ICON, open_shell

st.set_page_config(page_title="nvfp4viz", page_icon=ICON, layout="wide")

page = open_shell()
with boundary():
    page.run()
