-- ARGV: job, trajectory, attempt, worker, number, epoch, batch, max_lag, policy. 'go', 'wait', 'fenced'.
local id, worker, number, epoch = ARGV[2], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local batch, max_lag = tonumber(ARGV[7]), tonumber(ARGV[8])
local e = entry_of(id)
local mine = e and e[STATE] == 'running' and e[ATTEMPT] == tonumber(ARGV[3])
if not mine or (e[NUMBER] >= 0 and e[WORKER] ~= worker) then
  count('fenced', 1)
  return 'fenced'
end
if e[NUMBER] == number and e[EPOCH] == epoch then return 'go' end
local name = e[GROUP]
local g = group_of(name)
local others = g[OLDEST]
if e[NUMBER] >= 0 and e[NUMBER] == others then others = oldest_living(name, g, id) end
if others < 0 or number < others then
  local claimed = tonumber(call('HGET', CLAIMS, 'version') or -1)
  local late
  if ARGV[9] == 'wait' then
    local change = {[number] = 1}
    if g[OLDEST] >= 0 then change[g[OLDEST]] = (change[g[OLDEST]] or 0) - 1 end
    late = breach(claimed, batch, max_lag, change)
  else
    late = number + max_lag <= claimed
  end
  if late then return 'wait' end
end
e[WORKER], e[NUMBER], e[EPOCH] = worker, number, epoch
keep(id, e)
set_oldest(g, (others < 0 or number < others) and number or others)
keep_group(name, g)
return 'go'
