"""The recurrence in C over windows longer than any draft: tokens without drafts, solved in chunks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.kernels.native import recurrent
from specdec.kernels.native.call import path_width
from specdec.kernels.native.compiled import compiled
from specdec.kernels.recurrence import cpu as recurrence
from tests.kernels import trees
from tests.tolerances import KERNEL

TOLERANCE = KERNEL[torch.float32]

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no C compiler")


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("with_beta", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 17), (2, 48), (3, 131), (1, 512)])
def test_prompts_equal_the_plain_form(
    rows: int, width: int, with_beta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = replace(trees.Layer(dtype=torch.float32), key=24, value=17)
    slots = [7, 2, 5][:rows]
    ours, theirs = (trees.make_memory(layer, slots) for _ in range(2))
    records = trees.scattered(rows, 3, seed=3)
    before = trees.build_group([trees.chain(3)] * rows, slots, records=records, conv_taps=layer.taps)
    prompt = trees.build_group([trees.chain(width)] * rows, slots, paths=records, conv_taps=layer.taps)
    generator, scale = torch.Generator().manual_seed(0), layer.key**-0.5

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    k_path_BPGK = scale * draw(rows, path_width(prompt), layer.groups, layer.key)
    for group in (before, prompt):
        tokens = rows * group.width
        q_TGK, k_TGK = (scale * draw(tokens, layer.groups, layer.key) for _ in range(2))
        v_THW, decay_TH = draw(tokens, layer.heads, layer.value), -draw(tokens, layer.heads).abs()
        beta_TH = draw(tokens, layer.heads).sigmoid() if with_beta else None
        inputs = (q_TGK, k_TGK, v_THW, decay_TH, beta_TH)
        k_path = None if group.path is None else k_path_BPGK
        expected = recurrence.scan_window(*inputs, theirs, group, k_path)
        with monkeypatch.context() as patch:
            patch.setattr(recurrence, "scan_window", None)  # it would be compared with itself
            found = recurrent.scan_window(*inputs, ours, group, k_path)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        trees.assert_same_memory(ours, theirs, TOLERANCE)
