-- Forgets a session, whoever holds its lease, and notes up to which epoch: who still writes under one of them can tell
-- that the session was deleted, and did not just pass to another.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string)
-- KEYS[3] session lease (string: owner)
-- KEYS[4] session deletion (string: epoch)
-- KEYS[5] usage records (stream)
-- KEYS[6] open turns (sorted set: TENANT:SESSION by the time in ms to look at it)
-- ARGV[1] ttl of the note, ms
-- RETURNS {'OK'}
-- INCLUDES record_turn

local now = redis.call('TIME')
local epoch = tonumber(now[1]) * 1000000 + tonumber(now[2])
-- A damaged session can be deleted, too: what is no epoch counts as none.
local function is_a(kind, key)
  local found = redis.call('TYPE', key)
  return (type(found) == 'table' and found.ok or found) == kind
end
local stored = is_a('hash', KEYS[1]) and redis.call('HGET', KEYS[1], 'epoch') or ''
local noted = is_a('string', KEYS[4]) and redis.call('GET', KEYS[4]) or ''
for _, known in ipairs({ stored, noted }) do
  local number = tonumber(known)
  if number and number > epoch and number < 2 ^ 53 then -- the clock was set back
    epoch = number
  end
end
if is_a('hash', KEYS[1]) then
  record_turn()
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('SET', KEYS[4], string.format('%.0f', epoch), 'PX', ARGV[1])
return { 'OK' }
