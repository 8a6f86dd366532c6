"""A mixture: each client sees one kind of thing, with labels that the others do not have."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.files import write_images

from pfedgate.data import mixture

pytest.importorskip("pyarrow")


@pytest.mark.usefixtures("own_cache")
def test_thirds_of_the_clients_have_labels_of_their_own(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (1200, 28, 28), dtype=np.uint8), np.arange(1200) % 62
    write_images(tmp_path / "femnist/train.parquet", "image", x, writer_id=["w"] * 1200, character=y)
    federation = mixture(clients=7, samples=450, data_dir=tmp_path, novel=0.2)
    assert federation.classes == 72 == len(federation.class_names)
    assert federation.describe()["samples"] == 450
    kinds = [
        {"digits" if label < 10 else "letters" if label < 62 else "clothes" for label in np.flatnonzero(row)}
        for row in federation.histogram()
    ]
    assert sorted(kind for (kind,) in kinds) == ["clothes"] * 2 + ["digits"] * 3 + ["letters"] * 2
    # Pictures keep their labels.
    for client in federation.clients[:3]:
        part = federation.part(client, "train")
        assert all(
            any((x[y == label] == image[0].numpy()).all((1, 2)))
            for image, label in zip(part.x, part.y.tolist(), strict=True)
        )
    with pytest.raises(ValueError, match="at least 3 clients"):
        mixture(clients=2, data_dir=tmp_path)
