"""What a run left in its directory: read (`fsdp2kit.report.read`), listed, drawn. Nothing here imports torch."""
