"""Which rounds of a benchmark's record are plotted."""

import json

from jetspec.engine.benchmarks.growth import Point, main, points

RECORD = {
    "variants": [
        {"row": "ar_b1", "variant": "present", "ms": 4.6},
        {"row": "ar_b1", "variant": "joined", "ms": 4.5},
        {"batch": 1, "nodes": 128, "launch": "present", "us": 16.0},
    ],
    "growth": [
        {"row": "ar_b1", "ms": 4.9, "context": 8192, "peak_gb": 18.0},
        {"row": "tree_b4_16", "ms": 6.5, "peak_gb": 19.0},
        {"row": "tree_b1_1023", "failed": "OutOfMemoryError"},
    ],
}


def test_points_are_the_rounds_as_they_are() -> None:
    assert points(RECORD) == [
        Point("ar", 1, 0, 1024, 4.6, None),
        Point("ar", 1, 0, 8192, 4.9, 18.0),
        Point("tree", 4, 16, 1024, 6.5, 19.0),
    ]


def test_a_record_becomes_a_picture_and_an_empty_one_a_line(tmp_path, capsys) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RECORD))
    assert main([str(tmp_path / "a.json"), str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b.json").write_text("{}")
    assert main([str(tmp_path / "b.json"), str(tmp_path / "b.png")]) == 2
    assert main([str(tmp_path / "none.json"), str(tmp_path / "b.png")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert not (tmp_path / "b.png").exists()
