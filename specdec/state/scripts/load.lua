-- Reads a session's record as of one moment.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string: packed uint32, little-endian)
-- KEYS[3] session lease (string: owner)
-- RETURNS {} | {{field, value, ...} of the meta hash, bytes in the log, owner or '', ms until the session expires}
-- INCLUDES record_turn
--
-- A lease that would live longer than its ttl is void, as `acquire` has it.

local fields = redis.call('HGETALL', KEYS[1])
if #fields == 0 or has_expired() then
  return {}
end
local owner = redis.call('GET', KEYS[3]) or ''
local ttl = redis.call('HGET', KEYS[1], 'lease_ttl')
if owner ~= '' and ttl then
  local left = redis.call('PTTL', KEYS[3])
  local slack = 100 -- ms, as in `acquire`
  if left < 0 or left > tonumber(ttl) + slack then
    owner = ''
  end
end
return { fields, redis.call('STRLEN', KEYS[2]), owner, redis.call('PTTL', KEYS[open_ms() > 0 and 2 or 1]) }
