"""The names of the cells, to label what is computed for them: predictions, embeddings, scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuload.checks import check_names
from gpuload.tables import check_modalities
from gpuload.threads import import_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray


def obs_names(
    paths: Any,
    *,
    layer: str | Sequence[str] = "X",
    modality: str | None = "",
    storage_options: Mapping[str, Any] | None = None,
) -> NDArray[np.object_]:
    """Return the names (barcodes) of all cells, by row number: ``obs_names(paths)[batch.rows]`` are a minibatch's.

    Loaders hold no names, since those of 100 million cells take some 8 GB.

    Parameters
    ----------
    paths
        As given to `gpuload.open_loader`.
    layer
        A matrix of these cells, for files that have no ``"X"``; as given to `gpuload.open_loader`. Of several, the
        first is used, since all have the same cells.
    modality
        The modality whose cells' names to read, if there are several; by default the first of a mapping.
    storage_options
        As in `gpuload.open_loader`.

    Returns
    -------
    (n_obs,) object
        The index of obs, as strings, a missing name as anndata's missing value is written: ``"<NA>"``; for 10x files
        the barcodes, as for any other format without an index that has a column ``"barcode"``. Otherwise the name of a
        cell is its row number.

    Raises
    ------
    PlanError, StoreError, ReadError, CorruptDataError
        As `gpuload.open_loader`.
    """
    import_whole("gpuload.formats")
    from gpuload.formats import read_obs_names
    from gpuload.formats.addresses import at_addresses

    name = check_names("layer", layer, least=1)[0]
    modalities = check_modalities(modality or (), paths)
    return read_obs_names(at_addresses(paths, None, storage_options), modalities[0] if modalities else None, name)
