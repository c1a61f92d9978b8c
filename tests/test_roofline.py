"""The paper model of GPU speed: its arithmetic by hand, the published figures, and docs/gpu.md as it writes it."""

import pytest

from benchmarks import roofline
from benchmarks.roofline import B200, H200, MODELS, Kernel, efficiencies, product, training_step


def test_published_figures_that_were_not_fitted_are_within_a_fifth():
    errors = roofline.errors()
    assert len(errors) == 5
    assert max(map(abs, errors.values())) <= 0.2, errors


def test_constants_are_shares():
    assert all(0.5 < constant < 0.9 for constant in efficiencies().values())
    assert sum(f.fitted for f in roofline.figures()) == 2 * len(efficiencies())


def test_a_kernel_by_hand():
    kernel = Kernel("a", bytes=8e9, operations=9e12, occupancy=0.5)
    assert kernel.floor(B200) == 4e-3  # 9e12 / 2.25e15
    assert kernel.predicted(B200, {"memory": 0.5, "product": 1.0}) == 8e-3
    assert kernel.predicted(B200, {"memory": 0.1, "product": 1.0}) == pytest.approx(10e-3)


def test_occupancy_counts_whole_waves_and_tails():
    assert product(B200, "a", 128 * 148, 128, 64, 1, "bf16").occupancy == 1.0
    assert product(B200, "a", 128 * 149, 128, 64, 1, "bf16").occupancy == pytest.approx(149 / 296)
    assert product(B200, "a", 148, 128, 64, 148, "bf16").occupancy == pytest.approx(1 / 128)


@pytest.mark.parametrize("gpu", [B200, H200])
def test_a_prediction_is_never_below_its_floor(gpu):
    for model in MODELS:
        for recipe in roofline.ELEMENT_BYTES:
            for kernel in training_step(gpu, model, model.ranks[-1], recipe):
                assert kernel.predicted(gpu, efficiencies()) >= kernel.floor(gpu), (model, kernel)


@pytest.mark.tree
def test_the_page_is_what_the_model_says():
    text = roofline.DOCUMENT.read_text()
    assert f"<!-- roofline -->\n{roofline.markdown()}\n<!-- end -->" in text, "run `python -m benchmarks.roofline --write`"
    assert text.count("not measured") >= 2
    assert roofline.PICTURE.exists()


def test_command(capsys):
    roofline.main([])
    assert capsys.readouterr().out.startswith("Predicted, not measured.")
