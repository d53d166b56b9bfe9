"""`python -m eventhubs`."""

import asyncio

from eventhubs.server import main

asyncio.run(main())
