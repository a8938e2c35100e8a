"""Helpers that write and read files of records."""

import json

from oat.data.prompts import Source, read_prompts

RECORDS = [{"prompt": f'{n}+{n}=\n, "quoted"', "answer": str(2 * n), "note": "é☃"} for n in range(5)]


def read(records, split=None, **options):
    return read_prompts(Source(records, split=split), **options)


def write(folder, records):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
