"""Row → tokens → document → pack → global batch → a rank's share."""
