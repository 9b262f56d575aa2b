"""The manifest of a version; transfers are in tests/e2e."""

from forge.types import TensorSpec
from forge.weights import manifest


def test_a_manifest_counts_bytes_and_the_share_of_changed_elements() -> None:
    specs = {"a": TensorSpec(shape=(3, 4), dtype="bfloat16"), "b": TensorSpec(shape=(5,), dtype="float32")}
    m = manifest(specs, version=7, changed=5, total=17)
    assert m.version == 7
    assert m.num_bytes == 12 * 2 + 5 * 4
    assert m.changed_share == 5 / 17
    assert manifest({}, version=0, changed=0, total=0).changed_share == 0.0
