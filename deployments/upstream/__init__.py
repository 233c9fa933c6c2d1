"""External servers with OpenAI's API as one more place where a request can be served.

`client` asks one of them and gives deltas as a replica would, `answer` reads their chunks and believes nothing,
`events` cuts a byte stream into events. Upstreams cannot resume a broken answer, and know nothing of our token ids:
what needs those is not sent to them.
"""
