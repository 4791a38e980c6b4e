"""
What is kept free of idle guarantees: all of those that do not lend, the headroom of others, what was just given back.

Sums of integers over all accounts, so that a claim costs the same however many there are. Sequences are summed in
millionths and rounded up once for all: fifty guarantees of one sequence with a headroom of a tenth keep five free.
"""

from collections import deque
from dataclasses import dataclass, field

from envoy_tokenpools.core.account import Account
from envoy_tokenpools.core.admission import WHOLE_PPM, Terms, part
from envoy_tokenpools.core.cost import Cost

MAX_REST_MS = 250
REST_PART = 20
"""
What a guarantee gives back stays free for it for a moment: a twentieth of the mean holding time, up to `MAX_REST_MS`.

Its next request is often on its way, and would have to evict, or wait for, whoever took the place in between.
"""


@dataclass(slots=True)
class Withheld:
    """
    What of a pool only those may use whose guarantee it is.

    Attributes:
        tokens_per_second: of the token rates.
        sequences_ppm: of the idle sequences, in millionths.
        kv_bytes: of the idle KV bytes.
    """

    tokens_per_second: int = 0
    sequences_ppm: int = 0
    kv_bytes: int = 0
    _rests: deque[tuple[int, Account, Cost]] = field(default_factory=deque)

    def sequences_from(self, account: Account) -> int:
        """What is withheld from `account` for the others, in whole sequences."""
        return -(-(self.sequences_ppm - account.withheld_sequences_ppm) // WHOLE_PPM)

    def kv_bytes_from(self, account: Account) -> int:
        """What is withheld from `account` for the others, in bytes."""
        return self.kv_bytes - account.withheld_kv_bytes

    def replace_rate(self, old: Terms, new: Terms) -> None:
        """An account's terms change."""
        for terms, sign in ((old, -1), (new, 1)):
            rate = part(terms.guarantee.tokens_per_second, terms.withheld_ppm)
            self.tokens_per_second += sign * rate

    def update(self, account: Account) -> None:
        """An account's terms, or what it holds, have changed."""
        guarantee, ppm = account.terms.guarantee, account.terms.withheld_ppm
        withholds = ppm or account.resting_concurrency
        if not withholds and account.withheld_sequences_ppm == 0 == account.withheld_kv_bytes:
            return
        sequences = max(0, guarantee.concurrency - account.concurrency)
        resting = min(sequences, account.resting_concurrency)
        sequences_ppm = max(sequences * ppm, resting * WHOLE_PPM)
        idle_kv_bytes = max(0, guarantee.kv_bytes - account.kv_bytes)
        kv_bytes = max(part(idle_kv_bytes, ppm), min(idle_kv_bytes, account.resting_kv_bytes))
        self.sequences_ppm += sequences_ppm - account.withheld_sequences_ppm
        self.kv_bytes += kv_bytes - account.withheld_kv_bytes
        account.withheld_sequences_ppm = sequences_ppm
        account.withheld_kv_bytes = kv_bytes

    def rest(self, account: Account, cost: Cost, now_ms: int, hold_ms: int) -> None:
        """
        What a lending guarantee gives back now stays free for it for a moment; its account is updated afterwards.

        `hold_ms` is how long leases are held on average.
        """
        if account.terms.withheld_ppm == WHOLE_PPM:
            return
        account.rest(cost, 1)
        until_ms = now_ms + min(MAX_REST_MS, hold_ms // REST_PART)
        self._rests.append((until_ms, account, cost))

    def end_rests(self, now_ms: int) -> None:
        """What has rested is anybody's."""
        while self._rests and self._rests[0][0] <= now_ms:
            _, account, cost = self._rests.popleft()
            account.rest(cost, -1)
            self.update(account)
