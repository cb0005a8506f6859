-- Included by the scripts that end a turn or prolong a session. Writes the usage record of a turn, once.
--
-- A turn is open from its first `begin_request` until its record is written: `usage_ms` in the session's meta, the time
-- in ms for which records are kept, is above 0. An open turn's meta outlives its session by that time, so that the
-- record of a turn that nobody resumed can still be written. The tokens expire with the session.
--
-- KEYS[1] session meta (hash), KEYS[2] session tokens (string)
-- KEYS[5] usage records (stream), KEYS[6] open turns (sorted set: TENANT:SESSION by the time in ms to look at it)

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
    'key_id', 'model', 'request_id', 'output_start', 'length', 'stats_json', 'finish_reason', 'usage_id')
  local name, tenant, session = open_name()
  local prompt = tonumber(meta[4] or '') or 0
  local output = math.max(0, (tonumber(meta[5] or '') or 0) - prompt)
  local function count(of)
    return string.match(meta[6] or '', '"' .. of .. '":(%d+)') or '0'
  end
  redis.call('HSET', KEYS[1], 'usage_ms', '0')
  redis.call('ZREM', KEYS[6], name)
  redis.call('XADD', KEYS[5], 'MINID', '~', string.format('%.0f', math.max(0, server_ms() - kept_ms)), '*',
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
    'id', meta[8] or '')
  redis.call('PEXPIRE', KEYS[5], string.format('%.0f', kept_ms))
end
