"""The recipe of pipelines/modality.py as one model: genes in, proteins out."""

from __future__ import annotations

import json
import os
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anndata
import numpy as np
import pandas as pd
from modality_data import GENES, PROTEINS
from modality_engines import ENGINES, Engine

import gpuload
from gpuload import estimators
from gpuload.scores import mean_r2
from gpuload.source import saving

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from numpy.typing import ArrayLike, NDArray


class ProteinModel:
    """The recipe as one model: genes in, proteins out.

    What it learns are NumPy arrays, the same for every engine: a model fitted on a GPU can be saved, loaded and used
    to predict on a machine without one.

    Parameters
    ----------
    engine
        ``"ours"``, ``"sklearn"`` or ``"cuml"``.
    n_gene_components, n_protein_components
        Sizes of the two SVDs; limited by the number of cells, genes or proteins.
    gamma
        Corresponds to a length scale of 10. The widely copied GPU version omits it, and gets 1 / 300 instead.
    alpha
        Regularisation strength.
    n_rounds
        Number of shufflings of the batches, two models each. With a single batch there is one model.
    solver, n_landmarks
        ``"exact"``, ``"nystrom"`` (with this many landmarks), or ``"auto"``: exact up to this many cells.
    device
        Device of ours: ``"cpu"``, ``"cuda:0"`` or ``"auto"``.
    random_state
        Seed.

    Attributes
    ----------
    gene_names_, protein_names_
        Of the cells fitted.
    gene_components_ : (n_gene_components, n_genes) float32
        Of the genes' SVD.
    protein_components_ : (n_protein_components, n_proteins) float32
        Of the proteins' SVD.
    X_fit_, dual_coef_
        Of the mean of the ten models: `gpuload.estimators.KernelRidge`'s.
    scores_ : (n, n_gene_components) float32
        Standardised, for all cells fitted, including those without proteins; not saved.
    is_counts_ : bool or None
        Whether the program was given counts, which it normalises before it fits and predicts; None: fitted in Python
        to values as they were given. Saved.
    seconds_
        Duration of the steps of fitting; not saved.
    """

    is_counts_: bool | None

    LEARNT: ClassVar = (
        "gene_names_",
        "protein_names_",
        "gene_components_",
        "protein_components_",
        "X_fit_",
        "dual_coef_",
    )

    def __init__(
        self,
        engine: str = "ours",
        *,
        n_gene_components: int = 300,
        n_protein_components: int = 70,
        gamma: float = 0.005,
        alpha: float = 0.2,
        n_rounds: int = 5,
        solver: str = "auto",
        n_landmarks: int = 4000,
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        if engine not in ENGINES:
            raise gpuload.PlanError(f"engine={engine!r}: expected one of {', '.join(map(repr, ENGINES))}.")
        params = {name: value for name, value in locals().items() if name != "self"}
        made = ENGINES[engine](**params)  # first, since one that is refused must leave a model as it was
        self.params: dict[str, Any] = params
        self.engine: Engine = made

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters, as scikit-learn's tools ask for them."""
        del deep
        return dict(self.params)

    def set_params(self, **params: Any) -> Self:
        """Set parameters, as scikit-learn's tools do."""
        for name in params:
            if name not in self.params:
                raise gpuload.PlanError(f"{name}: no such parameter; there are {', '.join(self.params)}.")
        type(self).__init__(self, **{**self.params, **params})
        return self

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's description: a regressor of several targets."""
        tags = estimators.KernelRidge().__sklearn_tags__()
        tags.target_tags.single_output = False
        return tags

    def fit(
        self, genes: Any, proteins: Any = None, batch: ArrayLike | None = None, rows: ArrayLike | None = None
    ) -> Self:
        """Learn from cells with genes and proteins.

        Parameters
        ----------
        genes
            Log-normalised expression: a MuData, an AnnData, a DataFrame of cells x genes, or anything else that
            `gpuload.open_loader` opens, also as a mapping of its settings:
            ``{"paths": "cite.h5ad", "layer": "normalized"}``.
        proteins : (n, n_proteins)
            An AnnData, a DataFrame, or files or a mapping as for `genes`, whose cells are found by name; None of a
            MuData, whose modality "prot" it is; or an array, whose rows are taken in order. So are those of the others
            if `rows` are given, if the genes are a matrix, which has no names, or if a DataFrame's index is the
            default one.
        batch : (n,), optional
            Batches of the cells with proteins, in the order of the rows of `proteins`, or a Series with the names of
            cells as its index; else obs["batch"] of the genes, also of those in files; else all are one batch.
        rows : (n,), optional
            Indices of the cells that have the given proteins, or a mask of all cells; the others help to find the
            components. None: all, or those that the proteins name.
        """
        genes = _without_frame(genes)
        settings, known = _opened(genes), _known(genes, proteins, batch, rows)
        if not np.isfinite(known.proteins).all():
            raise gpuload.PlanError("proteins hold NaN or infinite values; pass rows to say which are measured.")
        start = time.perf_counter()
        scores, gene_components, gene_names = self.engine.gene_scores(settings)
        scores = standardised(scores)
        middle = time.perf_counter()
        chosen = known.among(len(scores))
        svd = self.engine.svd(min(self.params["n_protein_components"], *known.proteins.shape)).fit(known.proteins)
        y = np.asarray(svd.transform(known.proteins), dtype=np.float32)
        first = chosen[0] if len(chosen) else 0
        is_run = np.array_equal(chosen, np.arange(first, first + len(chosen)))  # copying these would be a waste
        X = scores[first : first + len(chosen)] if is_run else scores[chosen]
        learnt = self.engine.regress(X, y, known.batch)
        # only now, since a fit that fails must not mix its parts with those of the one before
        self.gene_names_, self.protein_names_ = gene_names, known.names
        self.gene_components_ = gene_components
        self.protein_components_ = np.asarray(svd.components_, dtype=np.float32)
        self.X_fit_, self.dual_coef_ = learnt
        self.scores_, self.is_counts_ = scores, None
        self.seconds_ = {"SVD of the genes, read from disk": middle - start, "regression": time.perf_counter() - middle}
        return self

    def predict(self, genes: Any) -> Any:
        """Predict the proteins of cells, given as to `fit`; their genes are matched by name.

        Returns
        -------
        (n, n_proteins) float32; of an AnnData or a MuData, an AnnData with the names of its cells and of the proteins;
        of a DataFrame, a DataFrame with these.
        """
        self._check_fitted()
        given, genes = genes, _without_frame(genes)
        settings = _opened(genes)
        svd = estimators.TruncatedSVD(len(self.gene_components_), device=self.params["device"])
        svd.components_, svd.n_features_in_ = self.gene_components_, self.gene_components_.shape[1]
        with self.engine.open(settings) as cells:
            has_same = list(cells.var_names) == list(self.gene_names_)
        with self.engine.open(settings if has_same else {**settings, "genes": list(self.gene_names_)}) as cells:
            predicted = self.predict_scores(standardised(svd.transform(cells)))
        if (table := _table_of(genes)) is None:
            return predicted
        if isinstance(given, pd.DataFrame):
            return pd.DataFrame(predicted, given.index, pd.Index(self.protein_names_))
        return anndata.AnnData(
            predicted, pd.DataFrame(index=table.obs_names), pd.DataFrame(index=pd.Index(self.protein_names_))
        )

    def predict_scores(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Predict from standardised scores, such as rows of `scores_`: (n, n_proteins)."""
        model = estimators.KernelRidge(gamma=self.params["gamma"], device=self.params["device"])
        model.X_fit_, model.dual_coef_, model.n_features_in_ = self.X_fit_, self.dual_coef_, self.X_fit_.shape[1]
        return np.asarray(np.maximum(model.predict(scores) @ self.protein_components_, 0))

    def score(self, genes: Any, proteins: Any = None) -> float:
        """Return the coefficient of determination, averaged over proteins, for cells given as to `fit`.

        Proteins are matched by name, too, and those that the model does not predict are left out. Where the model or
        the proteins have no names, since they come from an array, proteins are taken in order.
        """
        self._check_fitted()
        known = _known(_without_frame(genes), proteins, None, None, has_batch=False)
        wanted = self._in_order(known)
        if not np.isfinite(wanted).all():
            raise gpuload.PlanError("proteins hold NaN or infinite values; leave out the cells where they do.")
        found = self.predict(genes)
        found = np.asarray(found.X if hasattr(found, "obs_names") else found)
        found = found[known.among(len(found))]
        return mean_r2(found, wanted)

    def _in_order(self, known: Known) -> NDArray[np.float32]:
        """Return what was measured of the proteins that the model predicts, in its order."""
        names = pd.Index(self.protein_names_)
        if _has_names(names) and _has_names(known.names):
            places = known.names.get_indexer(names)
            if (places < 0).any():
                raise gpuload.PlanError(
                    f"proteins: there is no {str(names[places < 0][0])!r}, which the model predicts; give all "
                    f"{len(names)} of its proteins, or an array, whose columns are taken in order."
                )
            return known.proteins[:, places]
        if known.proteins.shape[1] != len(names):
            raise gpuload.PlanError(
                f"proteins: {known.proteins.shape[1]} columns, but the model predicts {len(names)}; give these, in "
                "its order."
            )
        return known.proteins

    def save(self, path: str | Path) -> None:
        """Write parameters and learned arrays to an .npz file (no pickles), atomically replacing an existing file."""
        self._check_fitted()
        learnt = {name: np.asarray(getattr(self, name)) for name in self.LEARNT}
        learnt = {name: found.astype(str) if found.dtype == object else found for name, found in learnt.items()}
        kept = {"model": "ProteinModel", "params": self.params, "is_counts": self.is_counts_}
        about = json.dumps(kept, default=_plain)
        with saving(path) as file:
            np.savez(file, about=np.array(about), **learnt)

    @classmethod
    def load(cls, path: str | Path, **params: Any) -> Self:
        """Load what `save` wrote; `params` override, as in ``engine="ours", device="cpu"`` without a GPU."""
        with Path(path).open("rb") as file:  # the system's errors are clear enough
            if not zipfile.is_zipfile(file):  # NumPy would take it for a pickle, and suggest loading it unsafely
                raise gpuload.CorruptDataError(
                    f"{path}: not a saved ProteinModel: not an .npz file, or one that was cut short. Pass the file "
                    "that ProteinModel.save or --save has written, or fit and save the model again."
                )
            try:
                with np.load(file, allow_pickle=False) as stored:
                    about = json.loads(str(stored["about"]))
                    learnt = {name: stored[name] for name in cls.LEARNT}
                    given, is_counts = {**about["params"], **params}, about.get("is_counts")
            except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
                raise gpuload.CorruptDataError(
                    f"{path}: not a saved ProteinModel: this .npz file lacks parts of one, or they are damaged. Pass "
                    "the file that ProteinModel.save or --save has written, or fit and save the model again."
                ) from error
        model = cls(**given)
        for name, found in learnt.items():
            setattr(model, name, found)
        model.is_counts_ = is_counts
        return model

    def _check_fitted(self) -> None:
        if not hasattr(self, "dual_coef_"):
            raise gpuload.PlanError("ProteinModel is not fitted; call fit first.")


def standardised(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each row with mean 0 and standard deviation 1."""
    found = scores - scores.mean(axis=1, keepdims=True)
    found /= np.maximum(found.std(axis=1, keepdims=True), 1e-9)
    return found


def _plain(value: Any) -> Any:
    """Return a NumPy scalar, such as a search over np.arange sets, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise gpuload.PlanError(f"params hold {value!r}, which is no number or string; set it to one, then save.")


@dataclass(frozen=True)
class Known:
    """Proteins that were measured: of which cells (None: of all, in order), in which batches, and their names."""

    proteins: NDArray[np.float32]
    names: pd.Index
    batch: NDArray[np.str_]
    rows: NDArray[np.int64] | None

    def among(self, n_obs: int) -> NDArray[np.int64]:
        """Return the indices of the cells with proteins, among so many; raise PlanError if they are not."""
        chosen = np.arange(n_obs) if self.rows is None else _checked_rows(self.rows, n_obs)
        if len(chosen) != len(self.proteins):
            raise gpuload.PlanError(
                f"proteins: {len(self.proteins)} rows for {len(chosen)} cells; give a row for each, or pass rows "
                "to say which cells they are of."
            )
        return chosen


def _without_frame(genes: Any) -> Any:
    """Return a DataFrame of cells x genes as an AnnData; anything else as it is."""
    if not isinstance(genes, pd.DataFrame):
        return genes
    if bad := [name for name, kind in genes.dtypes.items() if not pd.api.types.is_numeric_dtype(kind)]:
        raise gpuload.PlanError(f"genes: column {bad[0]!r} holds no numbers; leave it out of the DataFrame of genes.")
    obs, var = (pd.DataFrame(index=names.astype(str)) for names in (genes.index, genes.columns))
    return anndata.AnnData(genes.to_numpy(np.float32), obs, var)


def _table_of(genes: Any) -> Any:
    """Return the AnnData of the genes, or None if they are given in another form."""
    genes = _modality(genes, GENES) if hasattr(genes, "mod") else genes
    return genes if hasattr(genes, "obs_names") else None


def _modality(mdata: Any, name: str) -> Any:
    """Return the AnnData of a modality of a MuData."""
    if name not in mdata.mod:
        raise gpuload.PlanError(
            f"genes: a MuData with the modalities {', '.join(map(repr, mdata.mod))}; there is no {name!r}, so pass the "
            "AnnData of its genes, and that of its proteins."
        )
    return mdata.mod[name]


def _opened(genes: Any) -> dict[str, Any]:
    """Return the settings that open the genes."""
    if isinstance(genes, dict) and "paths" in genes:
        return genes
    table = _table_of(genes)
    if table is None:
        return {"paths": genes}
    return {"paths": table, "layer": "normalized" if table.X is None else "X"}


def _names_of(settings: Mapping[str, Any]) -> pd.Index | None:
    """Return the names of all cells that these settings open; None of a matrix in memory, which has none."""
    paths = settings["paths"]
    if hasattr(paths, "obs_names"):
        return paths.obs_names
    if hasattr(paths, "shape"):
        return None
    modality = settings.get("modality", "")
    return pd.Index(
        gpuload.obs_names(
            paths,
            layer=settings.get("layer", "X"),
            modality=modality if isinstance(modality, str) else next(iter(modality), ""),
            storage_options=settings.get("storage_options"),
        )
    )


def _index_of(frame: pd.DataFrame | pd.Series) -> pd.Index | None:
    """Return the names in a pandas index; None of the default one, which only counts."""
    return None if frame.index.equals(pd.RangeIndex(len(frame))) else frame.index.astype(str)


def _has_names(names: pd.Index) -> bool:
    """Return whether proteins have names, other than the numbers that those of an array get."""
    return list(names) != list(map(str, range(len(names))))


def _batches_of(settings: Mapping[str, Any]) -> NDArray[np.object_] | None:
    """Return obs["batch"] of all cells that these settings open; None if there is none."""
    names = ("paths", "layer", "modality", "join", "obs_table", "storage_options")
    opened = {name: settings[name] for name in names if name in settings}
    if hasattr(paths := settings["paths"], "shape") and not hasattr(paths, "obs"):
        return None
    for join in ({}, {"join": "outer"}):  # of several files, those that lack the column are a batch, too
        try:
            with gpuload.open_loader(
                **{**opened, **join, "obs": "batch"}, device="cpu", rank=0, world_size=1
            ) as loader:
                return loader.obs["batch"].to_numpy(dtype=object)
        except gpuload.StoreError as error:
            if not join and "no column 'batch'" not in str(error) and "has no obs" not in str(error):
                raise
    return None


def _check_unique(what: str, names: pd.Index) -> None:
    if not names.is_unique:
        raise gpuload.PlanError(
            f"{what}: the cell {str(names[names.duplicated()][0])!r} occurs twice, so cells cannot be found by name; "
            "make names unique, as with adata.obs_names_make_unique()."
        )


def _read(settings: Mapping[str, Any]) -> pd.DataFrame:
    """Return the proteins in files, with the names of their cells and their own."""
    common = {"batch_size": 2048, "fetch_factor": 2, "shuffle": False, "rank": 0, "world_size": 1}
    fixed = {"output": "dense", "dtype": "float32", "device": "cpu"}
    with gpuload.open_loader(**{**common, **settings, **fixed}) as loader:
        parts = [(batch.rows, batch.X.copy()) for batch in loader]
        columns = pd.Index(loader.var_names)
    rows, values = (np.concatenate(found) for found in zip(*parts, strict=True))
    order, names = np.argsort(rows, kind="stable"), _names_of(settings)
    return pd.DataFrame(values[order], None if names is None else names[rows[order]], columns)


def _values_of(proteins: Any) -> tuple[NDArray[np.float32], pd.Index | None, pd.Index]:
    """Return the values, the names of the cells, if they have any, and the names of the proteins."""
    if isinstance(proteins, dict) and "paths" in proteins:
        proteins = _read(proteins)
    elif isinstance(proteins, (str, os.PathLike)) or (
        isinstance(proteins, (list, tuple)) and proteins and isinstance(proteins[0], (str, os.PathLike))
    ):
        proteins = _read({"paths": proteins})
    if len(np.shape(proteins)) != 2:
        raise gpuload.PlanError(f"proteins has shape {np.shape(proteins)}; expected (n_cells, n_proteins).")
    if hasattr(proteins, "obs_names"):
        X = proteins.layers["normalized"] if proteins.X is None else proteins.X
        cells, names = proteins.obs_names, proteins.var_names
    elif isinstance(proteins, pd.DataFrame):
        X, cells, names = proteins, _index_of(proteins), proteins.columns.astype(str)
    else:
        X, cells, names = proteins, None, pd.RangeIndex(np.shape(proteins)[1]).astype(str)
    if not names.is_unique:
        raise gpuload.PlanError(
            f"proteins: {str(names[names.duplicated()][0])!r} is the name of two; make names unique, as with "
            "adata.var_names_make_unique()."
        )
    return np.asarray(X.toarray() if hasattr(X, "toarray") else X, dtype=np.float32), cells, names


def _checked_rows(rows: NDArray[Any], n_obs: int) -> NDArray[np.int64]:
    """Return rows as indices; a mask of all cells says them, too."""
    if rows.dtype == bool and rows.shape == (n_obs,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise gpuload.PlanError(
            f"rows: {rows.dtype} of shape {rows.shape}; give indices of cells, or a mask with the shape ({n_obs},)."
        )
    if rows.size and (rows.min() < 0 or rows.max() >= n_obs):
        wrong = rows.min() if rows.min() < 0 else rows.max()
        raise gpuload.PlanError(f"rows: {wrong} is no cell of the genes; give indices from 0 to {n_obs - 1}.")
    return rows.astype(np.int64)


def _known(
    genes: Any, proteins: Any, batch: ArrayLike | None, rows: ArrayLike | None, *, has_batch: bool = True
) -> Known:
    """Return the proteins that belong to the genes; all in one batch unless `has_batch`."""
    table, settings = _table_of(genes), _opened(genes)
    if proteins is None:
        if not hasattr(genes, "mod"):
            raise gpuload.PlanError("proteins=None: only a MuData has them with it.")
        proteins = _modality(genes, PROTEINS)
    values, cells, names = _values_of(proteins)
    n_given = len(values)
    order: Any = slice(None)  # of what was given, as the genes have it
    chosen = None if rows is None else np.asarray(rows)
    if chosen is not None and table is not None:  # else their number is known once the genes have been read
        chosen = _checked_rows(chosen, table.n_obs)
    of_genes = _names_of(settings) if cells is not None and chosen is None else None
    if cells is not None and of_genes is not None:
        _check_unique("proteins", cells)
        _check_unique("genes", of_genes)
        places = cells.get_indexer(of_genes)
        chosen = np.flatnonzero(places >= 0)
        if not len(chosen):
            raise gpuload.PlanError(
                "proteins: none of their cells has a name that is among those of the genes; give them the same names, "
                "or pass an array, whose rows are taken in order."
            )
        order = places[chosen]
        values, cells = values[order], cells[order]
    if isinstance(batch, pd.Series) and (of_series := _index_of(batch)) is not None:
        if cells is None or rows is not None:
            everyone = _names_of(settings)
            if everyone is not None and chosen is not None:
                chosen = _checked_rows(chosen, len(everyone))
            cells = everyone if everyone is None or chosen is None else everyone[chosen]
        if cells is not None:
            _check_unique("batch", of_series)
            order = of_series.get_indexer(cells)
            if (order < 0).any():
                raise gpuload.PlanError(
                    f"batch: its index lacks {(order < 0).sum()} of the {len(cells)} cells with proteins, such as "
                    f"{str(cells[order < 0][0])!r}; give the batch of each, or an array, which is taken in order."
                )
            n_given = len(batch)
    if batch is not None:
        batches = np.asarray(batch).astype(str)
        if batches.ndim != 1:
            raise gpuload.PlanError(f"batch has shape {batches.shape}; expected a label for each cell with proteins.")
        if len(batches) != n_given:
            raise gpuload.PlanError(
                f"batch: {len(batches)} labels for {n_given} cells with proteins; give one for each row of them."
            )
        batches = batches[order]
    elif table is not None and "batch" in table.obs:
        batches = table.obs["batch"].to_numpy()[slice(None) if chosen is None else chosen].astype(str)
    else:
        found = _batches_of(settings) if has_batch and table is None else None
        if found is None:
            batches = np.full(len(values), "all")
        else:
            batches = found[slice(None) if chosen is None else _checked_rows(chosen, len(found))].astype(str)
    return Known(values, names, batches, chosen)
