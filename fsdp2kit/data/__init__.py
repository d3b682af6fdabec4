"""Row → document → pack → share: sources, rows, chat, formats, tokens, documents, packing, loader or stream, build."""
