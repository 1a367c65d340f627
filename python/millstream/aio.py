"""The asyncio client: `millstream.aio.connect(url)`, the same as `millstream.connect` with `await`.

    import asyncio
    import millstream

    async def main() -> None:
        async with millstream.aio.connect() as client:
            orders = await client.create("shop/orders", content_type="application/json")
            await orders.append({"id": 1})
            async with orders.producer("importer") as producer:
                await producer.append({"id": 2})
            async for record in orders.follow():
                print(record.value)

    asyncio.run(main())

Where it sits: the public face of `client/aio`.
"""

from __future__ import annotations

from millstream.client.aio.arrow import AsyncArrowBatches
from millstream.client.aio.client import AsyncClient, AsyncFollower, AsyncStream, connect
from millstream.client.aio.producer import AsyncProducer

__all__ = [
    "AsyncArrowBatches",
    "AsyncClient",
    "AsyncFollower",
    "AsyncProducer",
    "AsyncStream",
    "connect",
]
