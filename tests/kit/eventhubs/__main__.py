"""`python -m eventhubs`."""

import asyncio

from kit.eventhubs.server import main

asyncio.run(main())
