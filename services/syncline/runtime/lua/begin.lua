-- ARGV: job, worker, number, epoch, batch, max_lag, policy; then trajectory and attempt of each. For each, in order:
-- 'go', 'wait' or 'fenced'. What one is told counts for those behind it.
local worker, number, epoch = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local batch, max_lag, policy = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local ids, answers, groups, changed, kept, fenced = {}, {}, {}, {}, {}, 0
for i = 8, #ARGV, 2 do ids[#ids + 1] = ARGV[i] end

local function write()
  keep_held(kept)
  kept = {}
end

local function late(g)
  local claimed = tonumber(call('HGET', CLAIMS, 'version') or -1)
  if policy ~= 'wait' then return number + max_lag <= claimed end
  local change = {[number] = 1}
  if g[OLDEST] >= 0 then change[g[OLDEST]] = (change[g[OLDEST]] or 0) - 1 end
  return breach(claimed, batch, max_lag, change)
end

local function begin(id, e)
  local name = e[GROUP]
  local g = groups[name] or group_of(name)
  groups[name] = g
  local others = g[OLDEST]
  if e[NUMBER] >= 0 and e[NUMBER] == others then
    write()
    others = oldest_living(name, g, id)
  end
  if (others < 0 or number < others) and late(g) then return 'wait' end
  e[WORKER], e[NUMBER], e[EPOCH] = worker, number, epoch
  kept[#kept + 1], kept[#kept + 2] = id, pack(e)
  set_oldest(g, (others < 0 or number < others) and number or others)
  changed[name] = g
  return 'go'
end

for i, e in ipairs(entries_of(ids)) do
  local mine = e and e[STATE] == 'running' and e[ATTEMPT] == tonumber(ARGV[7 + 2 * i])
  if not mine or (e[NUMBER] >= 0 and e[WORKER] ~= worker) then
    fenced = fenced + 1
    answers[i] = 'fenced'
  elseif e[NUMBER] == number and e[EPOCH] == epoch then
    answers[i] = 'go'
  else
    answers[i] = begin(ids[i], e)
  end
end
write()
for name, g in pairs(changed) do keep_group(name, g) end
if fenced > 0 then count('fenced', fenced) end
return answers
