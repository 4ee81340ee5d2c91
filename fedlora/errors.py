"""Every error that fedlora raises on purpose, with its process exit code.

```
FedLoraError                                  1
├ ConfigError (ValueError)                   10
│ └ UnsupportedCombinationError              11
├ PrivacyError                               20
│ ├ PrivacyParameterError (ValueError)       21
│ ├ SensitivityMismatchError                 22
│ ├ UnsupportedEventError                    23
│ ├ AccountingError                          24
│ ├ BudgetExceededError                      25
│ ├ PolicyRefusedError                       26
│ ├ LedgerError                              27
│ │ ├ LedgerIntegrityError                   28
│ │ └ DuplicateRoundError                    29
│ └ AuditFailedError                         30
├ GeometryError                              35
│ ├ RankMismatchError (ValueError)           36
│ └ NotOnManifoldError                       37
├ WireError                                  40
│ ├ SchemaVersionError                       41
│ ├ LayoutMismatchError                      42
│ ├ NonFinitePayloadError                    43
│ ├ StaleRoundError                          44
│ └ PayloadTooLargeError                     45
├ AggregationError                           50
│ ├ TooFewRepliesError                       51
│ └ InconsistentRepliesError                 52
├ DataError (ValueError)                     60
├ ModelError                                 61
├ ExportError                                62
├ CheckpointError                            63
├ FileAccessError                            64
├ FolderInUseError                           65
├ DeploymentError                            70
│ ├ AuthenticationError                      71
│ │ └ PeerIdentityError                      73
│ └ TrainerUnreachableError                  72
└ SimulationError                            80
  └ ClusterUnreachableError                  81
```

A message names the thing, what was got, what is allowed and what to do. It
never contains records, gradients or other private values.
"""

from __future__ import annotations

from typing import Any, ClassVar


def _rebuild(kind: type[FedLoraError], args: tuple[Any, ...], state: dict[str, Any]) -> FedLoraError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class FedLoraError(Exception):
    """Base class of every deliberate error; `exit_code` is the process's exit status."""

    exit_code: ClassVar[int] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by state, so that errors with keyword arguments travel between processes."""
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ConfigError(FedLoraError, ValueError):
    """A configuration cannot be used; `problems` lists every fault found, one line each."""

    exit_code = 10

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        """Join the summary and the list of problems into one readable message."""
        self.problems = problems
        super().__init__("\n".join([message, *(f"  - {problem}" for problem in problems)]))


class UnsupportedCombinationError(ConfigError):
    """Two settings, each valid alone, make no sense (or no privacy) together."""

    exit_code = 11


class PrivacyError(FedLoraError):
    """Base of everything that concerns a privacy guarantee."""

    exit_code = 20


class PrivacyParameterError(PrivacyError, ValueError):
    """A privacy parameter is missing, not finite or out of its range."""

    exit_code = 21


class SensitivityMismatchError(PrivacyError):
    """A sum was clipped in one metric and would be noised in another."""

    exit_code = 22


class UnsupportedEventError(PrivacyError):
    """A release cannot be accounted for, so it is refused."""

    exit_code = 23


class AccountingError(PrivacyError):
    """Accountants disagree beyond their stated error, or a bound did not converge."""

    exit_code = 24


class BudgetExceededError(PrivacyError):
    """A release would pass the budget; `spent`, `projected` and `budget` are epsilons."""

    exit_code = 25

    def __init__(self, message: str, *, spent: float, projected: float, budget: float) -> None:
        """Keep the three figures as attributes beside the message."""
        self.spent, self.projected, self.budget = spent, projected, budget
        super().__init__(message)


class PolicyRefusedError(PrivacyError):
    """A request asks for more than the data owner's own policy allows."""

    exit_code = 26


class LedgerError(PrivacyError):
    """The ledger cannot be read or written; nothing may be released."""

    exit_code = 27


class LedgerIntegrityError(LedgerError):
    """The ledger's hash chain, schema or history does not hold."""

    exit_code = 28


class DuplicateRoundError(LedgerError):
    """A round that was already reserved is asked for again; `reply_digest` is that of the reply, if one was sent."""

    exit_code = 29

    def __init__(self, message: str, *, reply_digest: str | None = None) -> None:
        """Keep the sha256 of the committed reply beside the message."""
        self.reply_digest = reply_digest
        super().__init__(message)


class AuditFailedError(PrivacyError):
    """An attack's lower bound lies above the claimed epsilon."""

    exit_code = 30


class WeakAuditError(PrivacyError):
    """An audit found nothing, but would not have noticed half the noise either, and a pass was required."""

    exit_code = 31


class GeometryError(FedLoraError):
    """Base of faults in frames, tangents and factors."""

    exit_code = 35


class RankMismatchError(GeometryError, ValueError):
    """Shapes or ranks do not fit together."""

    exit_code = 36


class NotOnManifoldError(GeometryError):
    """Frames are not orthonormal; `residual` is ||Q^T Q - I||."""

    exit_code = 37

    def __init__(self, message: str, *, residual: float) -> None:
        """Keep the residual as an attribute beside the message."""
        self.residual = residual
        super().__init__(message)


class WireError(FedLoraError):
    """A message cannot be accepted; nothing of it was used."""

    exit_code = 40


class SchemaVersionError(WireError):
    """A message speaks another version of the wire schema."""

    exit_code = 41


class LayoutMismatchError(WireError):
    """Names, shapes, dtypes or the shared lora_A differ from what was agreed."""

    exit_code = 42


class NonFinitePayloadError(WireError):
    """A block holds NaN or infinity (or overflows when squared)."""

    exit_code = 43


class StaleRoundError(WireError):
    """A message belongs to another round or run, or came twice."""

    exit_code = 44


class PayloadTooLargeError(WireError):
    """A message is larger than the configured limit."""

    exit_code = 45


class AggregationError(FedLoraError):
    """A round cannot be aggregated."""

    exit_code = 50


class TooFewRepliesError(AggregationError):
    """Fewer usable replies than `federation.min_replies`."""

    exit_code = 51


class InconsistentRepliesError(AggregationError):
    """Replies cannot be combined in the chosen mode."""

    exit_code = 52


class DataError(FedLoraError, ValueError):
    """A data source cannot be read or has the wrong schema (names file and row, never content)."""

    exit_code = 60


class ModelError(FedLoraError):
    """A model cannot be found, loaded or adapted."""

    exit_code = 61


class ExportError(FedLoraError):
    """An exported adapter does not give the logits that it must."""

    exit_code = 62


class CheckpointError(FedLoraError):
    """No usable checkpoint: missing, truncated or from another run."""

    exit_code = 63


class FileAccessError(FedLoraError):
    """A file or folder that the user named cannot be read or written (permissions, a full disk, a wrong kind)."""

    exit_code = 64


class FolderInUseError(FedLoraError):
    """A folder that one process at a time may work on is in use by another."""

    exit_code = 65


class DeploymentError(FedLoraError):
    """A deployment process could not be started or failed."""

    exit_code = 70


class AuthenticationError(DeploymentError):
    """A key, certificate or token was refused."""

    exit_code = 71


class PeerIdentityError(AuthenticationError):
    """Keys of secure aggregation are not signed by the pinned identity of the client that they are said to be of."""

    exit_code = 73


class TrainerUnreachableError(DeploymentError):
    """The relay cannot reach the resident trainer."""

    exit_code = 72


class SimulationError(FedLoraError):
    """A simulation could not run to its end."""

    exit_code = 80


class ClusterUnreachableError(SimulationError):
    """The Ray cluster cannot be reached."""

    exit_code = 81
