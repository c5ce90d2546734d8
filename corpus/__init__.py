"""From text to tokens to batches.

tokenizer     text to token ids and back
chat          the chat template and the end-of-text ids in a Hugging Face folder
dialogues     dialogues to token ids, of which the answers alone carry loss
writer        shards of tokens and their manifest, written so that a killed run can continue
packing       the order of documents in which few of them cross the rows of a long context
mixture       the folders of a mixture, and which of them gives each row
loader        shards opened, verified and read as batches, in an order that a run can resume in

Any wing and script may import this wing. It imports configurator and run/files.py alone, and no model.
"""
