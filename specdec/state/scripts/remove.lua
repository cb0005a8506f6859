-- Forgets a replica.
--
-- KEYS[1] records of one role (hash: replica id to record)
-- KEYS[2] their expiry (sorted set: replica id by server time in ms)
-- ARGV[1] replica id
-- RETURNS {'OK'}

redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return { 'OK' }
