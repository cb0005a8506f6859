-- Forgets a session, whoever holds its lease, and notes up to which epoch: who still writes under one of them can tell
-- that the session was deleted, and did not just pass to another.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string)
-- KEYS[3] session lease (string: owner)
-- KEYS[4] session deletion (string: epoch)
-- ARGV[1] ttl of the note, ms
-- RETURNS {'OK'}

local now = redis.call('TIME')
local epoch = tonumber(now[1]) * 1000000 + tonumber(now[2])
for _, known in ipairs({ redis.call('HGET', KEYS[1], 'epoch'), redis.call('GET', KEYS[4]) }) do
  if known and tonumber(known) > epoch then -- the clock was set back
    epoch = tonumber(known)
  end
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('SET', KEYS[4], string.format('%.0f', epoch), 'PX', ARGV[1])
return { 'OK' }
