"""Nodes of other packs beside ToMA: tried in a process per pack (worker, trying), watched and counted here."""
