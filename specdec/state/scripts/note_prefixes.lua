-- Notes which replicas hold the KV of a chain's prefixes.
--
-- KEYS[1...] prefixes of one chain, shortest first (sorted sets: holder by the server time in ms until which it is believed)
-- ARGV[1] ttl, ms
-- ARGV[2] most holders of a prefix; those noted last stay
-- ARGV[3...] holder, number of leading KEYS that it holds, holder, number, ...
-- RETURNS 'OK'

local now = redis.call('TIME')
local now_ms = tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
local believed = string.format('%.0f', now_ms + tonumber(ARGV[1]))
for depth, key in ipairs(KEYS) do
  for i = 3, #ARGV, 2 do
    if depth <= tonumber(ARGV[i + 1]) then
      redis.call('ZADD', key, believed, ARGV[i])
    end
  end
  redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('%.0f', now_ms))
  redis.call('ZREMRANGEBYSCORE', key, '(' .. believed, '+inf') -- of a clock that was ahead
  redis.call('ZREMRANGEBYRANK', key, 0, -1 - tonumber(ARGV[2]))
  redis.call('PEXPIRE', key, ARGV[1])
end
return redis.status_reply('OK')
