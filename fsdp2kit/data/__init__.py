"""From rows to batches: formats → masks → tokens → documents → packing → loader."""
