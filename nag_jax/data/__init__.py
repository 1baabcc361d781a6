"""Text in, batches of token rows out.

`sources` reads documents, `tokenizers` turns them into ids, `packing` cuts these into rows, `store`
keeps the rows on disk, `pipeline` shuffles and batches them. Only this package imports grain and
array_record; importing it alone imports none of its modules.
"""
