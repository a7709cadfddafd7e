"""New weights from trainers to inference engines (docs/weights.md).

endpoints.py   WeightSender, WeightReceiver and weight_update: what a program sees
shards.py      what a process holds under each name
plan.py        from what all ranks hold to what travels, or a table of differences
transfers.py   how it travels
checksum.py    whether it arrived as it was sent
protocol.py    the rounds of an update, and the decision of all ranks
update_group.py   parameter by parameter, as vLLM and OpenRLHF do; meeting.py: how they meet
loading.py     workers with load_weights(pairs), vLLM's among them
staging.py     where engines receive, and how new weights replace the old ones
"""
