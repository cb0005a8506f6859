-- Reads the open turns at which it is time to look: their sessions may have expired.
--
-- KEYS[1] open turns (sorted set: TENANT:SESSION by the time in ms to look at it)
-- ARGV[1] most turns
-- RETURNS {TENANT:SESSION, ...}

local now = redis.call('TIME')
local now_ms = string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms, 'LIMIT', 0, ARGV[1])
