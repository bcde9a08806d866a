local function group_of(g) return unpack_(call('HGET', GROUPS, g)) end
local function keep_group(name, g) call('HSET', GROUPS, name, pack(g)) end
local function member(group, index) return ARGV[1] .. '-' .. group .. '-' .. index end

-- One more (or fewer) unclaimed group has `version` as its oldest.
local function tally(version, by)
  if version >= 0 and call('HINCRBY', COUNTS, 'oldest:' .. version, by) == 0 then
    call('HDEL', COUNTS, 'oldest:' .. version)
  end
end

local function set_oldest(g, version)
  if g[PHASE] ~= 'claimed' and g[OLDEST] ~= version then
    tally(g[OLDEST], -1)
    tally(version, 1)
  end
  g[OLDEST] = version
end

-- The oldest version begun by a living member other than `except`, -1 if there is none.
local function oldest_living(name, g, except)
  local oldest = -1
  for index = 0, g[SIZE] - 1 do
    local id = member(name, index)
    local e = id ~= except and entry_of(id)
    if e and (e[STATE] == 'running' or e[STATE] == 'buffered') and e[NUMBER] >= 0 then
      if oldest < 0 or e[NUMBER] < oldest then oldest = e[NUMBER] end
    end
  end
  return oldest
end

-- After a member was accounted for: the group may join `ready`, or leave if no member lives.
local function settle(name, g)
  if g[PHASE] ~= 'claimed' then
    if g[ENDED] == g[SIZE] then
      set_oldest(g, -1)
      call('ZREM', READY, string.format('%012d', name))
      call('HDEL', GROUPS, name)
      count('groups_lost', 1)
      return
    end
    if g[ACCOUNTED] == g[SIZE] then
      g[PHASE] = 'ready'
      call('ZADD', READY, g[OLDEST], string.format('%012d', name))
    end
  end
  keep_group(name, g)
end

-- End a living member without training it: its work item and record go, and its group is settled.
local function finish(id, e, state, reason)
  local name = e[GROUP]
  local g = group_of(name)
  if e[STATE] == 'running' or e[REWARD] == '' then g[ACCOUNTED] = g[ACCOUNTED] + 1 end
  g[ENDED] = g[ENDED] + 1
  if e[STATE] == 'running' then
    call('XACK', WORK, 'rollout', e[WORK_ID])
    call('XDEL', WORK, e[WORK_ID])
  else
    call('XACK', RECORDS, 'trainer', e[RECORD])
    call('XDEL', RECORDS, e[RECORD])
    call('HDEL', REWARDS, id)
  end
  count(e[STATE], -1)
  count(state, 1)
  e[STATE], e[REASON], e[WORK_ID], e[RECORD] = state, reason, '', ''
  keep(id, e)
  if e[NUMBER] >= 0 and e[NUMBER] == g[OLDEST] then set_oldest(g, oldest_living(name, g, id)) end
  settle(name, g)
  if state == 'failed' then
    local letter = {'trajectory', id, 'attempt', e[ATTEMPT], 'reason', reason}
    call('XADD', DEAD, 'MAXLEN', '~', 10000, '*', unpack(letter))
  end
end

-- Give a running member to its next attempt: what it had begun no longer counts.
local function again(id, e)
  local name = e[GROUP]
  local g = group_of(name)
  local begun = e[NUMBER]
  e[ATTEMPT], e[WORKER], e[NUMBER], e[EPOCH] = e[ATTEMPT] + 1, '', -1, -1
  keep(id, e)
  if begun >= 0 and begun == g[OLDEST] then
    set_oldest(g, oldest_living(name, g, id))
    keep_group(name, g)
  end
end
