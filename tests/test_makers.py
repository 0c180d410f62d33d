"""The made inputs are what the tests that use them take them for."""
import json

import pytest

from tests.conftest import dequantised

V4_PRO_TENSORS = 284_809
EXPERTS = 61 * 384 * 3


def keys(checkpoint) -> dict[str, str]:
    return json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]


def test_v4_pro_has_every_key_and_nothing_on_disk(v4_headers):
    checkpoint = v4_headers("pro")
    names = keys(checkpoint)
    assert len(names) == V4_PRO_TENSORS
    assert sum(".mlp.experts." in name for name in names) == 4 * EXPERTS == 281_088
    files = list(checkpoint.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) > 800e9
    assert sum(file.stat().st_blocks * 512 for file in files) < 100e6


def test_v4_pro_with_attention_in_bf16_has_nvfp4_in_experts_only(v4_headers):
    packed = [name for name in keys(v4_headers("pro", "--attention", "bf16")) if name.endswith(".weight_scale")]
    assert len(packed) == EXPERTS
    assert all(".mlp.experts." in name for name in packed)


def test_v4_pro_in_the_other_spelling_has_as_many_keys(v4_headers):
    names = keys(v4_headers("pro", "--spelling", "compressed-tensors"))
    assert len(names) == V4_PRO_TENSORS
    assert sum(name.endswith(".weight_packed") for name in names) == sum(name.endswith(".weight_global_scale") for name in names)


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.timeout(900)  # it makes them
@pytest.mark.parametrize("spelling, parts", [("compressed-tensors", 3), ("modelopt", 4)])
def test_smollm2_in_nvfp4_has_210_modules_and_their_decoding_beside(smollm2, smollm2_nvfp4, spelling, parts):
    from safetensors import safe_open

    checkpoint = smollm2_nvfp4(spelling)
    assert len(keys(smollm2)) == 272
    assert len(keys(checkpoint)) == 272 + 210 * (parts - 1)
    with safe_open(dequantised(checkpoint), "pt") as file:
        assert len(file.keys()) == 210
