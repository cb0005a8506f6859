"""specdec's draft pools inside other engines: the engine keeps its API, and drafts come from services of their own."""
