"""`OneDNNLinear` against `nn.Linear` in float64."""

import pytest
import torch
from torch import nn

from rlflow.models.packed import OneDNNLinear, use_onednn

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_all_gradients_are_those_of_float64(bias):
    torch.manual_seed(0)
    exact = nn.Linear(24, 40, bias=bias, dtype=torch.float64)
    fast = nn.Sequential(nn.Linear(24, 40, bias=bias))
    fast[0].load_state_dict(exact.state_dict())
    use_onednn(fast)
    rows, weights = torch.randn(2, 7, 24), torch.randn(2, 7, 40)  # more than one row in more than one dimension

    found, expected = rows.clone().requires_grad_(), rows.double().requires_grad_()
    outputs = fast(found), exact(expected)
    (outputs[0] * weights).sum().backward()
    (outputs[1] * weights.double()).sum().backward()

    torch.testing.assert_close(outputs[0].double(), outputs[1], rtol=1e-6, atol=2e-6)
    computed, references = [found, *fast.parameters()], [expected, *exact.parameters()]
    for tensor, reference in zip(computed, references, strict=True):
        assert (tensor.grad.double() - reference.grad).norm() < 1e-6 * reference.grad.norm()


@needs_onednn
def test_layers_keep_their_parameters_under_their_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    before = dict(model.named_parameters())
    use_onednn(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: id(parameter) for name, parameter in before.items()
    }
    assert [type(module) for module in model] == [OneDNNLinear, nn.LayerNorm, OneDNNLinear]


def test_other_dtypes_are_computed_by_torch():
    model = nn.Sequential(nn.Linear(4, 3)).double()
    rows = torch.randn(5, 4, dtype=torch.float64)
    expected = model(rows)
    use_onednn(model)
    assert torch.equal(model(rows), expected)
