"""What optuna does in a search: it suggests points and says which trials are not worth going on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pfedgate.tune.space import Choices, Space
from pfedgate.tune.trials import COMPLETE, FAILED, PRUNED, Trial

STARTUP = 4  # trials before what they showed guides the next ones, or ends one early
WARMUP = 0.25  # share of the rounds in which no trial is ended: some start slowly


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError("tuning needs optuna: pip install 'pfedgate[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def sampler(seed: int) -> Any:
    """Who suggests the next point."""
    import optuna

    # constant_liar: a running trial counts as a bad one, so that workers do not all try the same place.
    return optuna.samplers.TPESampler(seed=seed % 2**32, n_startup_trials=STARTUP, constant_liar=True)


def distributions(space: Space) -> dict[str, Any]:
    """A space in optuna's words."""
    import optuna

    found: dict[str, Any] = {}
    for name, chosen in space.items():
        if isinstance(chosen, Choices):
            last = len(chosen.values) - 1
            ordered = optuna.distributions.IntDistribution(0, last)
            plain = optuna.distributions.CategoricalDistribution(range(last + 1))
            found[name] = ordered if chosen.ordered else plain
        elif chosen.whole:
            found[name] = optuna.distributions.IntDistribution(int(chosen.low), int(chosen.high), log=chosen.log)
        else:
            found[name] = optuna.distributions.FloatDistribution(chosen.low, chosen.high, log=chosen.log)
    return found


def study(space: Space, rounds: int, trials: Sequence[Trial]) -> Any:
    """Optuna's view of the trials on file, in the order they ended."""
    optuna = _optuna()
    pruner = optuna.pruners.MedianPruner(STARTUP, int(WARMUP * rounds))
    made = optuna.create_study(direction="maximize", sampler=sampler(0), pruner=pruner)
    for trial in trials:
        told = verdict(trial)
        made.add_trial(
            optuna.trial.create_trial(
                state=told["state"],
                value=told["values"],
                params=trial.point,
                distributions=distributions(space),
                intermediate_values=dict(trial.curve),
            )
        )
    return made


def verdict(trial: Trial) -> dict[str, Any]:
    """How a trial ended, in optuna's words."""
    import optuna

    states = optuna.trial.TrialState
    state = {COMPLETE: states.COMPLETE, PRUNED: states.PRUNED, FAILED: states.FAIL}[trial.state]
    return {"state": state, "values": trial.value if trial.state == COMPLETE else None}
