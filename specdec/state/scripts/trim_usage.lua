-- Removes old usage records, by nodes of the stream.
--
-- KEYS[1] usage records (stream)
-- ARGV[1] time before which records are removed, ms since 1970
-- RETURNS number of records removed; above 0 if there may be more

return redis.call('XTRIM', KEYS[1], 'MINID', '~', ARGV[1])
