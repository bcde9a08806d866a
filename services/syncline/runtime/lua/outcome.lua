-- What became of a group, told once, in the order in which groups end: see `ledger_shapes.Outcome`.

-- The value of a packed `Reward` that is scored; one that cannot be read is none. A table is made only of what does not
-- lie as `Reward` does: seven names and values behind one byte, state and value the third and fourth.
local function value_of(raw)
  local whole, rest, _, _, _, _, third, state, fourth, value = pcall(some_of, raw, 14, 1)
  if not (whole and rest == -1 and third == 'state' and fourth == 'value') then
    local reward
    whole, reward = pcall(unpack_, raw)
    if not whole or type(reward) ~= 'table' then return nil end
    state, value = reward['state'], reward['value']
  end
  return state == 'scored' and value or nil
end

-- Of these trajectories' rewards: how many are scored, their mean, the lowest and the highest value.
local function scores_of(ids)
  local n, sum, low, high = 0, 0, 0, 0
  for _, raw in ipairs(values_of(REWARDS, ids)) do
    local value = raw and value_of(raw)
    if value then
      if n == 0 or value < low then low = value end
      if n == 0 or value > high then high = value end
      n, sum = n + 1, sum + value
    end
  end
  return n, n > 0 and sum / n or 0, low, high
end

local function tell(name, prompt, how, reason, n, mean, low, high)
  call('XADD', OUTCOMES, '*', 'm', pack({name, prompt, how, reason, n, mean, low, high}))
end
