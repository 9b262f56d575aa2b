"""Routing over replicas."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from forge.service import GeneratorPool
from forge.testing import FakeRollouts, fake_completion
from forge.types import Completion, Manifest, SamplingRequest


def request(n: int) -> SamplingRequest:
    return SamplingRequest(token_ids=(n,), temperature=1.0, max_new_tokens=1)


@dataclass
class Gated(FakeRollouts):
    """Completes when its gate opens; a completion says which replica and prompt it is."""

    number: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    served: list[int] = field(default_factory=list)

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        self.served += [r.token_ids[0] for r in requests]
        await self.gate.wait()
        return [fake_completion(r.token_ids[0], replica=self.number) for r in requests]


async def test_a_group_goes_whole_to_the_replica_with_the_least_work() -> None:
    replicas = [Gated(number=0), Gated(number=1)]
    pool = GeneratorPool(replicas)
    calls = [asyncio.ensure_future(pool.generate([request(i)] * n)) for i, n in ((1, 4), (2, 2), (3, 2), (4, 1))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert replicas[0].served == [1] * 4 + [4]
    assert replicas[1].served == [2, 2, 3, 3]
    for r in replicas:
        r.gate.set()
    results = await asyncio.gather(*calls)
    assert [{c.replica for c in group} for group in results] == [{0}, {1}, {1}, {0}]


async def test_a_failed_call_gives_its_share_back() -> None:
    class Broken(FakeRollouts):
        async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
            raise RuntimeError("no engine")

    working = Gated(number=1)
    working.gate.set()
    pool = GeneratorPool([Broken(), working])
    (error,) = await asyncio.gather(pool.generate([request(0)] * 8), return_exceptions=True)
    assert isinstance(error, RuntimeError)
    assert pool._outstanding == [0, 0]


async def test_spreading_keeps_the_order_of_requests() -> None:
    replicas = [Gated(number=i) for i in range(3)]
    for r in replicas:
        r.gate.set()
    completions = await GeneratorPool(replicas).spread([request(i) for i in range(7)])
    assert [c.versions[0] for c in completions] == list(range(7))
    assert {c.replica for c in completions} == {0, 1, 2}


async def test_weights_go_to_every_replica() -> None:
    replicas = [FakeRollouts(), FakeRollouts()]
    await GeneratorPool(replicas).pull(Manifest(version=3, tensors={}, num_bytes=0, changed_share=0.0))
    assert [r.pulled for r in replicas] == [[3], [3]]
