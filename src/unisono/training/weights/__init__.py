"""New weights from trainers to inference engines (docs/weights.md).

endpoints.py   WeightSender, WeightReceiver and weight_update: what a program sees
shards.py      what a process holds under each name
plan.py        from what all ranks hold to what travels, or a table of differences
transfers.py   how it travels
checksum.py    whether it arrived as it was sent
protocol.py    the rounds of an update, and the decision of all ranks
staging.py     where engines receive, and how new weights replace the old ones
"""
