-- Reads the live replicas of a role and forgets the expired ones.
--
-- KEYS[1] records of one role (hash: replica id to record)
-- KEYS[2] their expiry (sorted set: replica id by server time in ms)
-- RETURNS {record, ...}, ordered by replica id

local now = redis.call('TIME')
local now_ms = string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
for _, replica_id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now_ms)) do
  redis.call('HDEL', KEYS[1], replica_id)
  redis.call('ZREM', KEYS[2], replica_id)
end

local live = redis.call('ZRANGE', KEYS[2], 0, -1)
table.sort(live)
local records = {}
for _, replica_id in ipairs(live) do
  local record = redis.call('HGET', KEYS[1], replica_id)
  if record then
    records[#records + 1] = record
  end
end
return records
