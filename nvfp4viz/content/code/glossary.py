from nvfp4viz.figures.words import LANGUAGES, words
from nvfp4viz.ui.glossary_terms import explained_on, uses

term = $term
for language in LANGUAGES:
    print(words(language, f"glossary.{term}.term"), "-", words(language, f"glossary.{term}.text"))

# where it is used, read off the pages' sources and texts
found = uses()[term]
print("explained on:", ", ".join(found.explained) or "none")
print("named on:", ", ".join(found.named) or "none")
for page in found.explained[:1]:
    print(page, "explains", ", ".join(explained_on(page)))
