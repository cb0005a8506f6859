-- Reads the live replicas of a role and forgets the expired ones.
--
-- KEYS[1] records of one role (hash: replica id to record)
-- KEYS[2] their expiry (sorted set: replica id by server time in ms)
-- ARGV[1] longest record, in bytes
-- ARGV[2] longest replica id, in bytes
-- RETURNS {replica id, record, ...}, ordered by replica id; '' for a record that is too long, and one pair of '' and ''
--   for all ids that are

local now = redis.call('TIME')
local now_ms = string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
for _, replica_id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now_ms)) do
  redis.call('HDEL', KEYS[1], replica_id)
  redis.call('ZREM', KEYS[2], replica_id)
end

local live = redis.call('ZRANGE', KEYS[2], 0, -1)
table.sort(live)
local pairs_found = {}
local has_long_id = false
for _, replica_id in ipairs(live) do
  if #replica_id > tonumber(ARGV[2]) then
    has_long_id = true
  elseif redis.call('HEXISTS', KEYS[1], replica_id) == 1 then
    local is_short = redis.call('HSTRLEN', KEYS[1], replica_id) <= tonumber(ARGV[1])
    pairs_found[#pairs_found + 1] = replica_id
    pairs_found[#pairs_found + 1] = is_short and redis.call('HGET', KEYS[1], replica_id) or ''
  end
end
if has_long_id then
  pairs_found[#pairs_found + 1] = ''
  pairs_found[#pairs_found + 1] = ''
end
return pairs_found
