-- Reads usage records in their order.
--
-- KEYS[1] usage records (stream)
-- ARGV[1] id of the first record
-- ARGV[2] id of the last record
-- ARGV[3] most records
-- RETURNS {{id, {field, value, ...}}, ...}

return redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
