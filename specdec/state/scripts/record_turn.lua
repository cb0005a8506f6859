-- Included by the scripts that end a turn or prolong a session. Writes the usage record of a turn, once.
--
-- A turn is open from its first `begin_request` until its record is written: `usage_ms` in the session's meta, the time
-- in ms for which records are kept, is above 0. An open turn's meta outlives its session by that time, so that the
-- record of a turn that nobody resumed can still be written. The tokens expire with the session.
--
-- Coordinators trim the stream, because they can tell a step of the server's clock from time that has passed. It expires
-- long after its last record, for a system that keeps none any more.
--
-- KEYS[1] session meta (hash), KEYS[2] session tokens (string)
-- KEYS[5] usage records (stream), KEYS[6] open turns (sorted set: TENANT:SESSION by the time in ms to look at it)

local ABANDONED_MS = 90 * 86400 * 1000

local function open_ms()
  return tonumber(redis.call('HGET', KEYS[1], 'usage_ms') or '') or 0
end

-- A session has tokens from the beginning of its first turn, so one with an open turn and none has expired.
local function has_expired()
  return open_ms() > 0 and redis.call('EXISTS', KEYS[2]) == 0
end

local function server_ms()
  local now = redis.call('TIME')
  return tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
end

local function open_name()
  local tenant, session = string.match(KEYS[1], '^[^:]*:([^:]*):{(.*)}:meta$')
  return tenant .. ':' .. session, tenant, session
end

-- The name by which the turn with `usage_ms` is known, in `usage_request`.
local function request_name(turn, request_id)
  return tostring(turn) .. ':' .. tostring(request_id)
end

local function prolong_session(session_ms)
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', tonumber(session_ms) + open_ms()))
  redis.call('PEXPIRE', KEYS[2], session_ms)
end

-- A Redis whose log of writes ends within a script may later load a part of the script and its repetition. Readers drop
-- the second record of a turn, which they know by tenant, session, request and `id`: the epoch that opened the turn.
local function record_turn()
  local kept_ms = open_ms()
  if kept_ms <= 0 then
    return
  end
  local meta = redis.call('HMGET', KEYS[1],
    'key_id', 'model', 'request_id', 'output_start', 'length', 'stats_json', 'finish_reason', 'usage_id', 'turn',
    'usage_request')
  local name, tenant, session = open_name()
  local prompt = tonumber(meta[4] or '') or 0
  local output = math.max(0, (tonumber(meta[5] or '') or 0) - prompt)
  local function count(of)
    return string.match(meta[6] or '', '"' .. of .. '":(%d+)') or '0'
  end
  redis.call('ZREM', KEYS[6], name) -- first: it is a write that a Redis without memory allows, and those after it too
  redis.call('HSET', KEYS[1], 'usage_ms', '0')
  if meta[10] ~= request_name(meta[9], meta[3]) then
    return -- a coordinator of a version without usage records has begun another turn since
  end
  local now_ms = server_ms()
  redis.call('XADD', KEYS[5], '*',
    'tenant', tenant,
    'key', meta[1] or '',
    'model', meta[2] or '',
    'session', session,
    'request', meta[3] or '',
    'prompt', string.format('%.0f', prompt),
    'cached', count('num_cached_prompt_tokens'),
    'output', string.format('%.0f', output),
    'drafted', count('num_draft_tokens'),
    'accepted', count('num_accepted_tokens'),
    'outcome', meta[7] or '0',
    'id', meta[8] or '',
    -- Ids never go back: those written after the clock was set back continue the one before.
    'time', string.format('%.0f', now_ms))
  local expires = string.format('%.0f', kept_ms + ABANDONED_MS)
  if redis.call('PTTL', KEYS[5]) < 0 then
    redis.call('PEXPIRE', KEYS[5], expires)
  else -- a turn of before `--usage-days` was raised shortens nothing
    redis.call('PEXPIRE', KEYS[5], expires, 'GT')
  end
end
