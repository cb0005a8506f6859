-- Reads which replicas hold the KV of a chain's prefixes.
--
-- KEYS[1...] prefixes of one chain (sorted sets: holder by the server time in ms until which it is believed)
-- ARGV[1] most holders of a prefix
-- RETURNS {{holder, ...}, ...}: one list a key, those noted last first

local now = redis.call('TIME')
local now_ms = string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
local holders = {}
for depth, key in ipairs(KEYS) do
  holders[depth] = redis.call('ZREVRANGEBYSCORE', key, '+inf', '(' .. now_ms, 'LIMIT', 0, ARGV[1])
end
return holders
