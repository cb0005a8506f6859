-- Stores a replica's heartbeat.
--
-- KEYS[1] records of one role (hash: replica id to record)
-- KEYS[2] their expiry (sorted set: replica id by server time in ms)
-- ARGV[1] replica id
-- ARGV[2] record, JSON
-- ARGV[3] ttl, ms
-- ARGV[4] longest ttl of a heartbeat, ms
-- RETURNS {'OK'}

local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
local expiry = string.format('%.0f', now_ms + tonumber(ARGV[3]))
redis.call('ZADD', KEYS[2], expiry, ARGV[1])
-- An entry that would live longer than any heartbeat is of a clock that was ahead: if its replica lives, it beats again.
local ahead = string.format('(%.0f', now_ms + tonumber(ARGV[4]))
for _, replica_id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], ahead, '+inf')) do
  redis.call('ZADD', KEYS[2], expiry, replica_id)
end
-- The keys outlive their last replica by nothing: a namespace nobody serves leaves nothing behind.
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < tonumber(ARGV[3]) then
    redis.call('PEXPIRE', key, ARGV[3])
  end
end
return { 'OK' }
