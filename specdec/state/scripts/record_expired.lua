-- Writes the record of a turn that nobody has resumed before its session expired, and removes what is left of the session.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string)
-- KEYS[3] session lease (string: owner)
-- KEYS[4] session deletion (string: epoch)
-- KEYS[5] usage records (stream)
-- KEYS[6] open turns (sorted set: TENANT:SESSION by the time in ms to look at it)
-- RETURNS 1 if a record was written, else 0
-- INCLUDES record_turn

local name = open_name()
if open_ms() <= 0 then
  redis.call('ZREM', KEYS[6], name)
  return 0
end
if not has_expired() then
  redis.call('ZADD', KEYS[6], string.format('%.0f', server_ms() + redis.call('PTTL', KEYS[2])), name)
  return 0
end
record_turn()
redis.call('DEL', KEYS[1], KEYS[3])
return 1
