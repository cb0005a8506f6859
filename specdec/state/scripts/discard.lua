-- Forgets a session as if it had never been, where the lease is the caller's.
--
-- KEYS[1] session meta (hash)
-- KEYS[2] session tokens (string)
-- KEYS[3] session lease (string: owner)
-- KEYS[4] session deletion (string: epoch)
-- KEYS[5] usage records (stream)
-- KEYS[6] open turns (sorted set: TENANT:SESSION by the time in ms to look at it)
-- ARGV[1] owner
-- ARGV[2] epoch
-- RETURNS {'OK'} | {'LEASE_LOST', epoch of the deletion or nil}
-- INCLUDES record_turn

if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then
  return { 'LEASE_LOST', redis.call('GET', KEYS[4]) }
end
redis.call('ZREM', KEYS[6], (open_name()))
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
return { 'OK' }
