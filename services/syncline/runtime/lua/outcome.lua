-- What became of a group, told once, in the order in which groups end: see `ledger_shapes.Outcome`.

-- Of these trajectories' rewards: how many are scored, their mean, the lowest and the highest value.
local function scores_of(ids)
  local n, sum, low, high = 0, 0, 0, 0
  for i = 1, #ids, 2000 do
    for _, raw in ipairs(call('HMGET', REWARDS, unpack(ids, i, math.min(i + 1999, #ids)))) do
      local whole, reward = pcall(unpack_, raw)  -- one that cannot be read counts as none
      if raw and whole and type(reward) == 'table' and reward['state'] == 'scored' then
        local value = reward['value']
        if n == 0 or value < low then low = value end
        if n == 0 or value > high then high = value end
        n, sum = n + 1, sum + value
      end
    end
  end
  return n, n > 0 and sum / n or 0, low, high
end

local function tell(name, prompt, how, reason, n, mean, low, high)
  call('XADD', OUTCOMES, '*', 'm', pack({name, prompt, how, reason, n, mean, low, high}))
end
