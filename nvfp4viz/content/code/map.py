from nvfp4viz.figures.places import PATHS, lessons_at, stations, stretches

# both lines, with what leaves each station and the lessons that sit there
for band in ("layer", "life"):
    print(f"{band}: {stretches(band, 'fp4')} stretch(es) in four bits")
    for station in stations(band):
        lessons = ", ".join(page for page, view in lessons_at(station.id))
        print(f"  {station.id:13} -> {station.carries:5} {station.scale:5} {lessons}")

# the way that the page numbers
print(" > ".join(PATHS[$path]))
