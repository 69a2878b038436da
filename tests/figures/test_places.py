"""The map's table: every place exists, and what the page says of the two lines follows from it."""

import itertools

import pytest

from nvfp4viz.figures import places
from nvfp4viz.figures.dataflow import STEPS

IDS = [station.id for station in places.STATIONS]


def test_stations_are_told_apart_by_their_ids():
    assert len(set(IDS)) == len(IDS)
    assert [*places.stations("layer"), *places.stations("life")] == list(places.STATIONS)


def test_every_lesson_stands_at_a_station_that_exists():
    known = {*IDS, places.EVERYWHERE, *(places.WHOLE + band for band in places.BANDS)}
    assert {stop.at for stops in places.LESSONS.values() for stop in stops} <= known
    assert all(places.LESSONS.values())
    for page, stops in places.LESSONS.items():
        assert len({stop.at for stop in stops}) == len(stops), page


def test_every_station_has_a_lesson():
    assert [place for place in IDS if not places.lessons_at(place)] == []


def test_the_layer_s_stations_are_attention_and_the_steps_of_dataflow():
    assert len(places.stations("layer")) == 1 + len(STEPS)


def test_four_bits_begin_at_each_quantisation_and_end_at_the_product_after_it():
    layer = places.stations("layer")
    assert places.stretches("layer", "fp4") == 2
    for here, after in itertools.pairwise(layer):
        if here.carries == "fp4":
            assert here.scale == "read"
            assert after.id in ("w13", "w2")
    assert [station.id for station in places.STATIONS if station.scale == "made"] == ["calibrate"]


def test_a_way_passes_lessons_once_each():
    for way in places.PATHS.values():
        assert set(way) <= places.LESSONS.keys()
        assert len(set(way)) == len(way)


def test_the_table_has_a_row_for_every_place():
    rows = places.place_rows()
    assert len(rows) == sum(map(len, places.LESSONS.values()))
    assert {row["band"] for row in rows} - {places.EVERYWHERE} == set(places.BANDS)
    assert {"page": "blocks", "band": "life", "place": "kernel", "view": "part=swizzle"} in rows


@pytest.mark.parametrize("place", IDS)
def test_lessons_of_a_station_come_in_the_table_s_order(place):
    order = list(places.LESSONS)
    found = [order.index(page) for page, _ in places.lessons_at(place)]
    assert found == sorted(found)
