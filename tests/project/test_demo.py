"""What `python dev.py demo` does, on the server of the tests."""

import re

import numpy
from PIL import Image


def test_demo_workflow_makes_pictures_and_a_row(server, capsys):
    import demo

    row, files = demo.run(server, "Flux", "flux")
    plain, merged, compared, shown = (numpy.asarray(Image.open(file).convert("RGB"), float) for file in files)
    assert plain.shape == merged.shape == (128, 128, 3)
    assert plain.std() > 10 and abs(plain - merged).mean() > 0
    assert compared.shape[1] > compared.shape[0] and shown.std() > 0
    assert row.startswith("Flux") and "x" in row and "dB" in row
    out = capsys.readouterr().out
    assert re.search(r"Flux with ToMA +\.{16}  16 steps, [\d.]+ s each\n", out), "a dot for each step, told or not"
