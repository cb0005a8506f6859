-- Reads a session's record as of one moment.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string: packed uint32, little-endian)
-- KEYS[3] session lease (string: owner)
-- RETURNS {} | {{field, value, ...} of the meta hash, bytes in the log, owner or '', ms until the session expires}

local fields = redis.call('HGETALL', KEYS[1])
if #fields == 0 then
  return {}
end
return { fields, redis.call('STRLEN', KEYS[2]), redis.call('GET', KEYS[3]) or '', redis.call('PTTL', KEYS[1]) }
